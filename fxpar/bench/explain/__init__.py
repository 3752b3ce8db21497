"""`fxpar bench explain`: whether the first change that is proposed for a setup makes its step faster."""

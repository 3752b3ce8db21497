"""`fxpar demo`: an example on several processes of this machine, and where its results are."""

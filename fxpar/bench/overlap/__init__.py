"""`fxpar bench overlap`: how much communication runs beside computation, with one rule of overlap after another."""

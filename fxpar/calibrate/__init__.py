"""`fxpar calibrate`: measure a cluster, and keep what was found as a file."""

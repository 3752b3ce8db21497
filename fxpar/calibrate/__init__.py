"""`fxpar calibrate`: measure a cluster, and save the result as a file."""

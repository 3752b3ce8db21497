"""`fxpar simulate`: what schedules come to with given costs, as a table, as pictures, and beside a measured step."""

"""`fxpar simulate`: predict schedules with given costs, as a table, as pictures, and next to a measured step."""

"""`fxpar bench pipeline`: how much communication schedules hide, against each other and against torch's pipelines."""

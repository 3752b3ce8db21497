"""`fxpar bench pipeline`: how much communication schedules hide, compared with each other and torch's pipelines."""

"""The decisions about a job, as pure functions: no clock, no disk, no network."""

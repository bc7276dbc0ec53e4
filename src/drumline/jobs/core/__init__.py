"""What becomes of a job. Pure: values in, decisions out; no clock, no disk, no network."""

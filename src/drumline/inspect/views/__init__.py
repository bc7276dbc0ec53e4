"""What a report looks like: text, pictures, traces."""

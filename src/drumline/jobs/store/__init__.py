"""The job database: its tables, its migrations, and the removal of old data."""

"""What the server knows beside jobs: slices of a lost database, and the hosts that were met."""

"""What a run tells: progress, metrics, throughput, goodput."""

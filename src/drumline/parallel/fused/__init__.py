"""Matrix products that send and receive from inside one TPU kernel (Pallas, Mosaic)."""

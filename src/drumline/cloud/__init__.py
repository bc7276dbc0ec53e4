"""The source of slices: the Cloud TPU API, at Google or served by the emulator."""

"""Where slices come from: the Cloud TPU API, at Google or served by the emulator."""

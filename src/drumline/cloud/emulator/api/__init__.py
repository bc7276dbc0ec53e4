"""Cloud TPU REST v2 as the emulator serves it, its login, and the controls beside it."""

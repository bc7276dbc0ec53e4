"""Cloud TPU REST v2 as the emulator serves it, with its login and its controls."""

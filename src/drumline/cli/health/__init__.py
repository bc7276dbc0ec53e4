"""Commands about sound and unsound hardware."""

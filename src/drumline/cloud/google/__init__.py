"""The Cloud TPU API (REST, v2): its calls, its states and texts, and authentication."""

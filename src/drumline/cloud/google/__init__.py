"""The client of the Cloud TPU API (REST, v2): calls, authentication, states and errors."""

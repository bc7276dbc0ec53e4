"""One function run in several ways that round elsewhere, and the first operation that differs."""

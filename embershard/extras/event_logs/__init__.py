"""Logs of users' events: windows of a user's history to train on, and a generated log. See docs/extras.md."""

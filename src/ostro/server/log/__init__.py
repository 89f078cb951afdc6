"""The server's log: its set-up, its wording, and what libraries write to standard error."""

"""The server's log: its set-up, its wording, and the capture of standard error."""

"""The torch backend: models on CPUs and Macs, HRMs and encoders anywhere, and the parts of several ranks."""

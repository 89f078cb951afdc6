"""What `bench/cpu.py` is put together from: the engines it measures, each in processes of its own, and its bars."""

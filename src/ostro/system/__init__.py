"""The machine Ostro runs on: its resources, its environment variables, and whether its files can be trusted."""

"""Fast paths, each beside a plain twin that tests hold it to."""

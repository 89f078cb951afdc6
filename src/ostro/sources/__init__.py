"""Models in object stores, and the local cache of them. Importing this imports no client of any store.

base        what a store can do: list, stat, read a range of one generation
gcs s3      two stores; local, the listing of a directory
models      which models lie under a prefix
fetch       a model's files, from a store into the cache
partial     a download under way, on the disk
store       the cache: what is in it, who uses it, what has to go
"""

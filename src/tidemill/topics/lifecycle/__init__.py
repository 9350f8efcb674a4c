"""Life cycle of a partition's log apart from appends: retention, deletion, checkpoint and restore.

retention.py   where a log may start, by time and size
deletion.py    what precedes a deletion, and the end of a deleted partition's log
checkpoint.py  partition rows for the metastore
restore.py     writing logs into empty consensus
"""

"""keeper: what keeps a cluster's data in order, and takes away what nobody needs any more.

Owns checkpoint, restore, the deep check, compaction, holds, retention and collection: every stored thing has an
owner here that deletes it. Owns no format: the rooms below say what a thing is and how it is read.
"""

"""Access to a cluster: its users, and the rules that say what they may do."""

"""Replicas of sharding groups: tables are sharded over the ranks of a group, and groups average the rows they train."""

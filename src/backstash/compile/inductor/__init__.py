"""The partitioner that is handed to torch, and the options and backends by which users ask for it."""

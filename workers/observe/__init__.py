"""What a worker tells its operators: logs."""

"""What stands for rows that a mask selects, where all rows are kept."""

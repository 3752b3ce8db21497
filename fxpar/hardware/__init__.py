"""What machines can do: the clusters that people have, and their networks."""

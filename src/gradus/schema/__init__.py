"""What flows between the parts of gradus: recipes, clusters, plans, and errors. Imports nothing of ours, no torch."""

"""The oldest and the newest that Portus promises to work with, in environments of their own."""

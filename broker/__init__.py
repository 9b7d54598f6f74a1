"""The broker daemon: routes chunk-tagged messages between workers and clients, and keeps the cursors."""

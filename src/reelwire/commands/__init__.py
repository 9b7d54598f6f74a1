"""The commands, one file each. A daemon, a pipeline or the SDK is imported only inside the command that needs it."""

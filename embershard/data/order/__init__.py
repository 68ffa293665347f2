"""The order of samples: epochs, hot and cold segments, and the stream of one rank's batches."""

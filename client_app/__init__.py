"""The client half of the running app: Flower client, local training, durable client state."""

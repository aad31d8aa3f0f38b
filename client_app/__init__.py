"""The client half of the running app: Flower client, local training, durable client state."""

from fl_app import earlier_names as earlier_names

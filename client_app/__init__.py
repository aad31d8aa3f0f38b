"""The client half of the running app: Flower client, local training, durable client state."""

from fl_app import earlier_names

earlier_names.accept({"client_app.private": "client_app.private_round", "client_app.state": "client_app.stored_state"})

"""All of a run that knows Flower: the wire, the exchange with clients, the registry of nodes, the app that a run submits."""

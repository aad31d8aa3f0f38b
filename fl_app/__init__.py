"""Code that all parts of Corolla share: configuration, layout, wire, models, data and results."""

from fl_app import earlier_names

_FROM_HERE = ("app_bundle", "flower_patches", "outgoing", "refusal", "wire")
_FROM_SERVER = (
    "agreement",
    "client_registry",
    "discovery",
    "exchange",
    "identity",
    "inprocess",
    "replies",
)

earlier_names.accept({f"fl_app.{name}": f"fl_app.transport.{name}" for name in _FROM_HERE})
earlier_names.accept(
    {
        "fl_app.data.arrays": "fl_app.data.user_arrays",
        "fl_app.privacy.companies": "fl_app.privacy.aggregation_groups",
        "fl_app.server.superlink": "fl_app.transport.fetched_reply",
        "fl_app.site": "fl_app.site_directory",
        "fl_app.tasks.scores": "fl_app.tasks.scoring",
    }
)
earlier_names.accept({f"fl_app.server.{name}": f"fl_app.transport.{name}" for name in _FROM_SERVER})

"""The chapters of the transport contract; ``bagua.testing.transport_contract`` joins them."""

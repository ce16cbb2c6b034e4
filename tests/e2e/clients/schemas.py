"""What the suites ask for: an answer and a tool whose every field is bounded, so that random weights get to its end."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

City = Literal["Paris", "Rome", "Oslo"]


class Place(BaseModel):
    model_config = ConfigDict(extra="forbid")

    city: City
    rating: Annotated[int, Field(ge=1, le=5)]
    tags: Annotated[list[Literal["old", "big", "wet"]], Field(max_length=2)]


class GetWeather(BaseModel):
    """Today's weather in a city."""

    model_config = ConfigDict(extra="forbid")

    city: City
    unit: Literal["C", "F"]

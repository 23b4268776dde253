import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;

/** Java's HTTP client with its default settings: it proposes HTTP/2 with the first request of each connection. */
public class Upgrade {
  public static void main(String[] arguments) throws Exception {
    String topic = arguments[0];
    String[][] requests = {
      {"PUT", "", "{\"ttl\": 60}"},
      {"GET", "", ""},
      {"POST", "/publish", "{\"messages\": [\"hello\"]}"},
      {"POST", "/poll", "{}"},
    };
    for (String[] one : requests) {
      HttpRequest request = HttpRequest.newBuilder(URI.create(topic + one[1]))
          .header("Content-Type", "application/json")
          .method(one[0], HttpRequest.BodyPublishers.ofString(one[2]))
          .build();
      HttpResponse<String> answer =
          HttpClient.newHttpClient().send(request, HttpResponse.BodyHandlers.ofString());
      System.out.println(answer.statusCode() + " " + answer.body().strip());
    }
  }
}

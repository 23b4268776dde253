package oracle;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.OutputStream;
import java.io.PrintStream;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.Set;
import java.util.concurrent.ExecutionException;
import kafka.server.KafkaConfig;
import kafka.server.KafkaRaftServer;
import kafka.tools.StorageTool;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.consumer.ConsumerGroupMetadata;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.Uuid;
import org.apache.kafka.common.serialization.StringDeserializer;
import org.apache.kafka.common.serialization.StringSerializer;
import org.apache.kafka.common.utils.Time;

/**
 * A Kafka broker and Kafka's client, which execute one call per line.
 *
 * <p>Arguments: a folder, the port of the broker, the advertised port (for example of a proxy), and the port of the
 * controller. Each line of standard input is a call as JSON; each line of standard output is its result or its error.
 */
public final class Oracle {
  private static final String GROUP = "billing";
  private static final ObjectMapper JSON = new ObjectMapper();

  private final String seen;
  private final String direct;
  private final Map<String, KafkaProducer<String, String>> instances = new HashMap<>();

  private Oracle(String seen, String direct) {
    this.seen = seen;
    this.direct = direct;
  }

  public static void main(String[] arguments) throws Exception {
    PrintStream answers = System.out;
    System.setOut(new PrintStream(OutputStream.nullOutputStream()));
    KafkaRaftServer server = broker(Path.of(arguments[0]), arguments[1], arguments[2], arguments[3]);
    Oracle oracle = new Oracle("127.0.0.1:" + arguments[2], "127.0.0.1:" + arguments[1]);
    answers.println("{\"result\": \"ready\"}");
    BufferedReader calls = new BufferedReader(new InputStreamReader(System.in));
    for (String line = calls.readLine(); line != null; line = calls.readLine()) {
      Map<String, Object> answer = new HashMap<>();
      try {
        answer.put("result", oracle.call(JSON.readTree(line)));
      } catch (ExecutionException error) {
        answer.put("error", error.getCause().getClass().getSimpleName());
      } catch (RuntimeException error) {
        answer.put("error", error.getClass().getSimpleName());
      }
      answers.println(JSON.writeValueAsString(answer));
    }
    Runtime.getRuntime().halt(0);
  }

  private static KafkaRaftServer broker(Path folder, String port, String seen, String controller) throws Exception {
    Properties settings = new Properties();
    settings.put("process.roles", "broker,controller");
    settings.put("node.id", "1");
    settings.put("controller.quorum.voters", "1@127.0.0.1:" + controller);
    settings.put("listeners", "PLAINTEXT://127.0.0.1:" + port + ",CONTROLLER://127.0.0.1:" + controller);
    settings.put("advertised.listeners", "PLAINTEXT://127.0.0.1:" + seen);
    settings.put("controller.listener.names", "CONTROLLER");
    settings.put("listener.security.protocol.map", "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT");
    settings.put("log.dirs", folder.resolve("log").toString());
    for (String topic : List.of("offsets.topic", "transaction.state.log")) {
      settings.put(topic + ".replication.factor", "1");
      settings.put(topic + ".num.partitions", "1");
    }
    settings.put("transaction.state.log.min.isr", "1");
    settings.put("group.initial.rebalance.delay.ms", "0");
    Path file = folder.resolve("server.properties");
    try (OutputStream out = Files.newOutputStream(file)) {
      settings.store(out, null);
    }
    String[] format = {"format", "-t", Uuid.randomUuid().toString(), "-c", file.toString()};
    StorageTool.execute(format, new PrintStream(OutputStream.nullOutputStream()));
    KafkaRaftServer server = new KafkaRaftServer(new KafkaConfig(settings, false), Time.SYSTEM);
    server.startup();
    return server;
  }

  private Object call(JsonNode call) throws ExecutionException, InterruptedException {
    String instance = call.path("instance").asText();
    String topic = call.path("topic").asText();
    switch (call.get("call").asText()) {
      case "create":
        try (Admin admin = Admin.create(client(direct))) {
          admin.createTopics(Set.of(new NewTopic(topic, 1, (short) 1))).all().get();
        }
        return null;
      case "register":
        KafkaProducer<String, String> producer = producer(call.path("name").asText());
        instances.put(instance, producer);
        if (!call.path("name").asText().isEmpty()) {
          producer.initTransactions();
        }
        return null;
      case "begin":
        instances.get(instance).beginTransaction();
        return null;
      case "send":
        for (JsonNode value : call.get("values")) {
          instances.get(instance).send(new ProducerRecord<>(topic, value.asText())).get();
        }
        return null;
      case "copy":
        return copy(instances.get(instance), topic, call.get("to").asText(), call.get("limit").asInt());
      case "commit":
        instances.get(instance).commitTransaction();
        return null;
      case "abort":
        instances.get(instance).abortTransaction();
        return null;
      case "read":
        return values(read(topic, call.get("committed").asBoolean(), 0, Integer.MAX_VALUE));
      default:
        throw new IllegalArgumentException(call.toString());
    }
  }

  /** Reads after the committed position, publishes the messages to another topic, and commits their position. */
  private List<String> copy(KafkaProducer<String, String> producer, String from, String to, int limit)
      throws ExecutionException, InterruptedException {
    TopicPartition partition = new TopicPartition(from, 0);
    long position;
    try (Admin admin = Admin.create(client(direct))) {
      OffsetAndMetadata known =
          admin.listConsumerGroupOffsets(GROUP).partitionsToOffsetAndMetadata().get().get(partition);
      position = known == null ? 0 : known.offset();
    }
    List<ConsumerRecord<String, String>> found = read(from, true, position, limit);
    for (ConsumerRecord<String, String> record : found) {
      producer.send(new ProducerRecord<>(to, record.value())).get();
      position = record.offset() + 1;
    }
    producer.sendOffsetsToTransaction(
        Map.of(partition, new OffsetAndMetadata(position)), new ConsumerGroupMetadata(GROUP));
    return values(found);
  }

  private List<ConsumerRecord<String, String>> read(String topic, boolean committed, long start, int limit) {
    Properties settings = client(direct);
    settings.put("isolation.level", committed ? "read_committed" : "read_uncommitted");
    settings.put("enable.auto.commit", "false");
    TopicPartition partition = new TopicPartition(topic, 0);
    List<ConsumerRecord<String, String>> found = new ArrayList<>();
    try (KafkaConsumer<String, String> consumer =
        new KafkaConsumer<>(settings, new StringDeserializer(), new StringDeserializer())) {
      consumer.assign(Set.of(partition));
      consumer.seek(partition, start);
      // The end for a reader of committed messages: the position of the first undecided message.
      long end = consumer.endOffsets(Set.of(partition)).get(partition);
      while (consumer.position(partition) < end) {
        found.addAll(consumer.poll(Duration.ofMillis(100)).records(partition));
      }
    }
    return found.subList(0, Math.min(limit, found.size()));
  }

  private static List<String> values(List<ConsumerRecord<String, String>> records) {
    return records.stream().map(ConsumerRecord::value).toList();
  }

  private KafkaProducer<String, String> producer(String name) {
    Properties settings = client(seen);
    settings.put("enable.idempotence", "true");
    settings.put("retry.backoff.ms", "20");
    settings.put("reconnect.backoff.ms", "20");
    settings.put("linger.ms", "0");
    if (!name.isEmpty()) {
      settings.put("transactional.id", name);
    }
    return new KafkaProducer<>(settings, new StringSerializer(), new StringSerializer());
  }

  private static Properties client(String address) {
    Properties settings = new Properties();
    settings.put("bootstrap.servers", address);
    return settings;
  }
}
